"""Options, figures, plots, pages and progress of commands about loads."""
