"""What holds for all tests."""

import signal

# A shell starts background jobs with SIGINT ignored, nohup does so with SIGHUP, and children
# inherit it: tests that send these signals would wait for programs that never hear them.
for number, default in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, default)
