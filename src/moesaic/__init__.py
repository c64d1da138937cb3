"""Build, grow and take apart Mixture-of-Experts language models."""

from moesaic.modeling import register as _register

__version__ = "0.1.0"

# `AutoModelForCausalLM.from_pretrained(folder)` works after `import moesaic`, which imports neither torch nor transformers.
_register()
