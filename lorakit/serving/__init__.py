"""OpenAI's HTTP API for one base and any number of adapters.

engine.py has the thread that decodes; there is no HTTP in it. app.py has the table of routes. A request comes through
routes.py (log and key), requests.py (its model), completion_routes.py, answer.py, reply.py.
"""
