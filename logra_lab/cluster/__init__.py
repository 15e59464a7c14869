"""Groups of engines and trainers as Ray actors, with the interfaces that one of each has."""
