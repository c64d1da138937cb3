"""Parity with other engines, in their own environments: `make interop`. See docs/serving.md."""
