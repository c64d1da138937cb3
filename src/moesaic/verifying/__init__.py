"""`verify`: which statement about an upcycled or expanded checkpoint applies, and its measured error."""

from moesaic.verifying.expanded import ExpandedReport
from moesaic.verifying.report import Check, LayerMeasure, VerifyReport
from moesaic.verifying.verifier import verify, verify_upcycled

__all__ = ["Check", "ExpandedReport", "LayerMeasure", "VerifyReport", "verify", "verify_upcycled"]
