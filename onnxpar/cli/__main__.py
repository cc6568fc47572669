"""`python -m onnxpar.cli`: the command line where no `onnxpar` script is installed."""

from onnxpar.cli import main

raise SystemExit(main())
