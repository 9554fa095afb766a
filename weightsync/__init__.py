"""New weights from the trainer to generators that are generating."""
