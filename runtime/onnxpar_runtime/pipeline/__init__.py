"""Pipeline schedules as data, and the programs that play them.

`schedule_kinds` makes the computations of a schedule, `transfers` adds the messages, `check` and
`simulate` play them without data. `work` and `player` run them, with values from `carriers`.
"""
