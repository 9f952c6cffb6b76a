"""YAML files to objects: the only place where names become things."""
