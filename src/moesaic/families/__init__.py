"""Model families: a row of `moe_table` (with experts) or `dense_table` (without) is all that is known of one."""
