"""One log file for each rank."""

import logging
import sys
from contextlib import suppress
from pathlib import Path

from onnxpar_runtime.errors import LaunchError

PACKAGE = "onnxpar_runtime"
# Without a handler Python would print warnings and errors to stderr a second time.
logging.getLogger(PACKAGE).addHandler(logging.NullHandler())


class _File(logging.FileHandler):
    """A log that ends, with one warning, when it cannot be written, such as on a full disk."""

    def handleError(self, record: logging.LogRecord) -> None:  # of logging
        reason = sys.exc_info()[1]
        if not isinstance(reason, OSError):
            super().handleError(record)
            return
        logging.getLogger(PACKAGE).removeHandler(self)
        with suppress(OSError):
            self.close()
        sys.stderr.write(
            f"onnxpar: warning: {self.baseFilename}: cannot be written: {reason.strerror}; the log "
            "of this rank ends here\n"
        )


def open_log(directory: str | Path, rank: int) -> Path:
    """Writes this process's log to `rank0007.log` in `directory`, which is created if missing.

    Lines have time, rank, level and message. Returns the file's path.

    Raises:
        LaunchError: The file cannot be written.
    """
    path = Path(directory) / f"rank{rank:04d}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            # The user did not give this name, so somebody else may have put a link there.
            raise LaunchError(f"{path}: expected no link, because the log is written there")
        handler = _File(path, mode="w", encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"{path}: cannot be written: {error.strerror or error}") from None
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s r{rank} %(levelname)s %(name)s: %(message)s")
    )
    logger = logging.getLogger(PACKAGE)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return path
