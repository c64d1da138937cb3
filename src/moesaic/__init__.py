"""Build, grow and take apart Mixture-of-Experts language models."""

__version__ = "0.1.0"
