"""`moesaic export`: the same model in another family, layout or file format."""
