"""Algorithm choice by prediction: cost constants fitted to measured calls, and predicted times."""
