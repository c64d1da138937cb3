"""Training and validation data: read, tokenised once, packed, mixed. `moesaic.data.recipe` does not import torch."""
