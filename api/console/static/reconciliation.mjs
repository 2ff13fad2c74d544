export const reconciliation = { id: "reconciliation", title: "reconciliation", calls: [], scopes: "", async show() {} };
