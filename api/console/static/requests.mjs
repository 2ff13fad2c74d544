export const requests = { id: "requests", title: "requests", calls: [], scopes: "", async show() {} };
