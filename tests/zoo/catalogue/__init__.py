"""Every third-party model that one generic maker can build: captured, planned, applied and compared (docs/zoo.md)."""
