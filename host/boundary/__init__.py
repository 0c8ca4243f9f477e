"""The boundary around plugins: calls are recorded, timed, checked and attributed here."""
