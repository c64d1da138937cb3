"""`moesaic report`: one HTML file about inspections, training runs and evaluations. Torch-free.

`sources` says what each input is; `runs`, `inspections` and `results` read one kind each into plain values; `packing`
writes those as data that can never become markup; `page` puts data, style, scripts and Plotly into one file.
"""
