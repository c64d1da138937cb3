"""Training rules for routers: which experts a token may use, the losses that shape routing, and its statistics.

`config` is free of torch. `rules` are pure functions of logits and a `RoutingContext` (`types`); `install` puts them on
a model; `losses`, `cross_entropy` and `balancing` turn the recorded decisions into training signals; `stats` counts.
"""
