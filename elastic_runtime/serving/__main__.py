"""`python -m elastic_runtime.serving`: serve one model folder until told to stop."""

from elastic_runtime.serving.server import main

if __name__ == "__main__":
    raise SystemExit(main())
