"""The suites inside the package, a YAML file each; their form is `moesaic.evaluation.suites.Suite`."""
