"""Which experts matter for a task (`select`), checkpoints of these alone (`extract`), the way back (`merge-back`)."""
