export const audit = { id: "audit", title: "audit", calls: [], scopes: "", async show() {} };
