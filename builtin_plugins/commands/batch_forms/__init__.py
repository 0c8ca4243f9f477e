"""The forms of files that `hardpoint generate --file` answers."""
