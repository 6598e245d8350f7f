"""The command line: one module for each command or group of commands.

commands        the group of all commands; imports each one when it is used; what several share
serving         serve: one process, or a parent with its workers
configuration   check, schema
sessions        sessions …, upgrade, downgrade; the store for commands that read it
operating       stats, exchange show, key new, doctor
backtest        backtest
demonstration   demo
"""
