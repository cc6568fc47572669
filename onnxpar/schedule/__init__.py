"""When communication happens: which collectives start ahead of the program that needs them.

Takes partitioned programs; gives the same programs, with collectives that run in the background. It
changes no result. Begin with `start_ahead`. (The schedule of a pipeline is the runtime's.)
"""
