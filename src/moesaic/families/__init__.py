"""What each model family's checkpoint looks like: the only place that knows a family's tensor names."""
