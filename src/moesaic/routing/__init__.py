"""Training rules for routers: which experts a token may use, the losses that shape routing, and its statistics.

`config` is free of torch and has the table of rules. `rules` chooses experts from logits, `pools` has the documents of
a micro-batch and EMO's document pools, `install` puts a rule on a model's routers, `losses` and `stats` read what they
decided.
"""
