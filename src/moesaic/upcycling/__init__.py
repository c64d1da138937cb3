"""Dense checkpoints to mixture-of-experts checkpoints: the verb `upcycle`.

Importing this package imports no torch; `run` (the conversion itself), `experts`, `methods` and `router_init` do.
"""
