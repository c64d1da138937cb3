"""Reading and writing checkpoints: headers first, tensors streamed, memory flat, output complete or absent."""
