"""megabatch inside other people's trainers, a module for each."""
