"""The version of the package, for what must not import all of it."""

VERSION = "0.1.0"
