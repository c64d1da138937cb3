"""Training: our own small loop on torch and transformers' distributed configuration."""
