"""The command line: one module for each command or group of commands.

commands        the group of all commands; imports each one when it is used
options         options and output that several commands share
serving         serve: one process, or a parent with its workers
configuration   check, schema
database        upgrade, downgrade; the store for commands that read it
sessions        sessions …
backtest        backtest
demonstration   demo
"""
