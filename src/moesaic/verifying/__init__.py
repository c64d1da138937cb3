"""`verify`: which statement about an upcycled or expanded checkpoint applies, and its measured error."""
