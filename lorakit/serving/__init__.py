"""OpenAI's HTTP API for one base and any number of adapters.

engine.py has the thread that decodes; there is no HTTP in it. A request comes through app.py (every route),
request_log.py, keys.py, completion_routes.py, answer.py, reply.py.
"""
