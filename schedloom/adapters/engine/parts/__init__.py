"""The mixins of a composed scheduler, one for each concern. A composition has only those that its policies use."""
