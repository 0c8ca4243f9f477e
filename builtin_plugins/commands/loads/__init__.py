"""What commands about loads share: options, figures, plots, pages, progress."""
