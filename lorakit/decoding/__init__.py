"""Rows of one base that are decoded together: slots of keys and values, sampling, the batch that they join and leave.

Files in this order: sampling.py, generation.py, kv_cache.py, slot_model.py, kv_memory.py, batch.py.
"""
