"""`StateError`, under the name that it had."""

from redivider.errors import StateError as StateError
