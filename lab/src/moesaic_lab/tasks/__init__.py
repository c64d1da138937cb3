"""What a step does beside the verbs: each task reads its settings from a file and writes rows or data."""
