"""The commands of the command line, one file for each group. `__main__` gives them their names."""
