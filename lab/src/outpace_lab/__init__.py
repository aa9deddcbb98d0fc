"""The laboratory of outpace: methods of research, training, measuring and tuning."""
