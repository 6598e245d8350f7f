"""The command line: one module for each command or group of commands.

commands        the group of all commands, which imports each one when it is used; shared options and output
serving         serve: one process, or a parent with its workers
configuration   check, schema
sessions        sessions …, upgrade, downgrade; opens the store for other commands too
operating       stats, exchange show, key new, doctor
backtest        backtest
demonstration   demo
"""
