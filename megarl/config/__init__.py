"""Settings: the schema, how files become a ``Config``, what may not be combined. No torch here."""
