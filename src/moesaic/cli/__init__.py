"""The command line: `verbs` lists the verbs, `build` makes their flags of recipe classes, `app` runs a command line."""
