"""The command line: parsing and printing only; one module per verb, each calls one function of the public API."""
