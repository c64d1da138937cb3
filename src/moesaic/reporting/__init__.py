"""`moesaic report`: one HTML file about inspections, training runs and evaluations. Torch-free.

`report` says what each input is; `payload` reads each kind into plain values; `page` writes those as data that can
never become markup, and puts data, style, scripts and Plotly into one file.
"""
