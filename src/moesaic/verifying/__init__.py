"""`verify`: which statement about an upcycled checkpoint applies, and its measured error."""

from moesaic.verifying.report import Check, LayerMeasure, VerifyReport
from moesaic.verifying.verifier import verify

__all__ = ["Check", "LayerMeasure", "VerifyReport", "verify"]
