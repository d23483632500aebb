"""The recipes: a file here is a command, a folder holds the parts."""
