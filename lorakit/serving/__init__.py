"""One base, any number of adapters, and requests that join and leave its batch at every step.

Files in this order: sampling.py, detokenizer.py, kv_cache.py, generation.py, engine.py. No HTTP is in them.
A request comes through app.py (every route), request_log.py, keys.py, completion_routes.py, answer.py, reply.py.
"""
