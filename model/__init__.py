"""The transformer: torch only, one device."""
