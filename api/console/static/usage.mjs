export const usage = { id: "usage", title: "usage", calls: [], scopes: "", async show() {} };
